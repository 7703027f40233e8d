// The weight-stationary array: two sets of N x N weights, and each column's sum over the rows of
// activation * weight, exact (microarchitecture.md, "MAC array"). Diagonal weights: one product a
// column. PE_FORM = 0: rows in loops, fast in simulation; 1: a module for each element.
module tw_mac_array
  import tw_pkg::*;
#(
    parameter int unsigned PE_FORM = 0,
    parameter int unsigned SUM_BITS = 16 + $clog2(N)
) (
    input logic clk,
    input logic row_full,  // a row of weights is complete
    input logic [7:0] row_bytes[N],
    input logic [$clog2(N)-1:0] row,
    input logic row_set,
    input logic row_int4,  // two weights a byte
    input logic vector_full,  // a vector of activations is complete
    input logic [7:0] vector[N],
    input logic set,  // of weights it is multiplied with
    input logic diag,  // of the instruction, for weights and activations
    input logic weight_unsigned,  // planted fault: of the last column
    output logic signed [SUM_BITS-1:0] sum_q[N]  // of the vector of the cycle before
);
  function automatic logic [7:0] nibble(input logic [7:0] packed_pair, input logic high);
    logic [3:0] bits;
    bits = high ? packed_pair[7:4] : packed_pair[3:0];
    nibble = {{4{bits[3]}}, bits};
  endfunction

  if (PE_FORM != 0) begin : g_pe
    logic signed [SUM_BITS-1:0] sum[N];
    for (genvar c = 0; c < N; c++) begin : g_column
      logic [7:0] weight;
      assign weight = row_int4 ? nibble(row_bytes[c/2], c % 2 == 1) : row_bytes[c];
      for (genvar r = 0; r < N; r++) begin : g_row
        logic signed [SUM_BITS-1:0] above, below;  // the column's sum
        if (r == 0) begin : g_top
          assign above = '0;
        end else begin : g_inner
          assign above = g_column[c].g_row[r-1].below;
        end
        // A diagonal row goes to the diagonal, and zeros everywhere else.
        tw_mac_pe pe (
            .clk,
            .load(row_full && (diag || row == $clog2(N)'(r))),
            .load_set(row_set),
            .load_weight(diag && r != c ? 8'd0 : weight),
            .set,
            .weight_unsigned(weight_unsigned && c == N - 1),
            .activation(vector[r]),
            .sum_in(above),
            .sum_out(below)
        );
      end
      assign sum[c] = g_row[N-1].below;
    end
    always_ff @(posedge clk) if (vector_full) sum_q <= sum;
  end else begin : g_loops
    typedef logic [7:0] vector_t[N];
    typedef logic signed [7:0] weights_t[N][N];
    typedef logic signed [31:0] sums_t[N];
    weights_t weight_q[2];  // row, column; diagonal weights are in row 0

    // 32 bits a sum, and a function not expanded where it is called: Verilator makes loops of it
    // that compilers turn into vector instructions. Synthesis drops the bits that are only signs.
    function automatic sums_t column_sums(input weights_t weight, input vector_t activation);
      // verilator no_inline_task
      for (int unsigned c = 0; c < N; c++) column_sums[c] = '0;
      for (int unsigned r = 0; r < N; r++) begin
        for (int unsigned c = 0; c < N; c++) begin
          column_sums[c] = column_sums[c] + 32'($signed(activation[r])) * 32'(weight[r][c]);
        end
      end
    endfunction

    always_ff @(posedge clk) begin
      if (row_full) begin
        logic signed [7:0] next[N];
        for (int unsigned c = 0; c < N; c++) begin
          next[c] = row_int4 ? nibble(row_bytes[c/2], c[0]) : row_bytes[c];
        end
        weight_q[row_set][row] <= next;
      end
    end

    always_ff @(posedge clk) begin
      if (vector_full) begin
        sums_t sum;
        logic signed [SUM_BITS-1:0] next[N];
        if (diag) begin
          for (int unsigned c = 0; c < N; c++) begin
            sum[c] = 32'($signed(vector[c])) * 32'(weight_q[set][0][c]);
          end
        end else begin
          sum = column_sums(weight_q[set], vector);
        end
        // The planted fault: a negative weight without its sign is 256 too large.
        if (weight_unsigned) begin
          for (int unsigned r = 0; r < N; r++) begin
            if (diag ? r == N - 1 && weight_q[set][0][N-1][7] : weight_q[set][r][N-1][7]) begin
              sum[N-1] = sum[N-1] + (32'($signed(vector[r])) <<< 8);
            end
          end
        end
        for (int unsigned c = 0; c < N; c++) next[c] = SUM_BITS'(sum[c]);
        sum_q <= next;
      end
    end
  end
endmodule
