// tw_vec_rows: what a row's elements have in common: largest code, sums, and from them, once a row,
// a reciprocal (softmax) or the reciprocal of a root (layer normalisation), a bit a cycle. What is
// computed: docs/concepts/numerics.md, "Rows"; when: "Vector unit" of
// docs/concepts/microarchitecture.md.
module tw_vec_rows
  import tw_pkg::*;
#(
    parameter int unsigned CHUNK_BITS  // of a chunk's number of elements
) (
    input  logic                    clk,
    input  logic                    rst,
    input  logic [7:0]              fault,
    input  logic                    start,        // the cycle of the pop
    input  logic [511:0]            head,
    input  logic                    take,         // a chunk's codes are there
    input  logic                    chunk_first,  // of its pass
    input  logic                    pass_first,   // of its row
    input  logic                    pass_last,
    input  logic [CHUNK_BITS-1:0]   elements,
    input  logic [LANES-1:0][7:0]   codes,
    input  logic [LANES-1:0][15:0]  powers,       // softmax: E of each code
    input  logic                    row_ready,        // every chunk before the last pass was taken
    output logic [7:0]              peak,         // softmax: the largest code
    output logic [15:0]             reciprocal,
    output logic [5:0]              amount,       // softmax: the result's shift; else that of `slope`
    output logic [30:0]             slope,        // layer normalisation: of a code, before the shift
    output logic signed [38:0]      offset
);
  localparam int unsigned TOTAL_BITS = 30;  // 2^14 elements of 16 bits
  localparam int unsigned SPREAD_BITS = 51;
  localparam logic [3:0] LAST_STEP = 4'd15;

  wire f_row_tail = FAULTS_BUILT && fault == FAULT_ROW_TAIL;
  wire f_root_odd = FAULTS_BUILT && fault == FAULT_ROOT_ODD;

  /* verilator lint_off UNUSEDSIGNAL */
  vec_softmax_t    of_softmax;
  vec_layer_norm_t of_norm;
  /* verilator lint_on UNUSEDSIGNAL */
  assign of_softmax = vec_softmax_t'(head);
  assign of_norm    = vec_layer_norm_t'(head);

  logic is_softmax_q;
  logic [14:0] n_q;
  logic [14:0] multiplier_q;
  logic [3:0] shift_q;
  logic [50:0] epsilon_q;
  always_ff @(posedge clk) begin
    if (start) begin
      is_softmax_q <= head[7:0] == OP_VEC_SOFTMAX;
      n_q <= 15'(of_norm.n0) + 15'd1;
      multiplier_q <= of_softmax.multiplier;
      shift_q <= of_softmax.shift;
      epsilon_q <= of_norm.epsilon;
    end
  end

  // Largest code and sums; what lies beyond the row's end takes no part.
  logic [7:0] peak_q;
  logic [TOTAL_BITS-1:0] total_q;      // of powers, or of squares
  logic signed [21:0] sum_q;           // of codes
  logic [7:0] chunk_peak;
  logic [TOTAL_BITS-1:0] chunk_total;
  logic signed [21:0] chunk_sum;
  /* verilator lint_off LATCH */  // variables of a block are no latches
  always_comb begin
    chunk_peak  = chunk_first ? 8'h80 : peak_q;
    chunk_total = chunk_first ? '0 : total_q;
    chunk_sum   = chunk_first ? '0 : sum_q;
    for (int unsigned i = 0; i < LANES; i++) begin
      automatic logic [15:0] addend;
      addend = 16'(signed'(codes[i])) * 16'(signed'(codes[i]));
      if (is_softmax_q) addend = powers[i];
      if (CHUNK_BITS'(i) < elements || f_row_tail) begin
        if (signed'(codes[i]) > signed'(chunk_peak)) chunk_peak = codes[i];
        chunk_total = chunk_total + TOTAL_BITS'(addend);
        chunk_sum = chunk_sum + 22'(signed'(codes[i]));
      end
    end
  end
  /* verilator lint_on LATCH */
  always_ff @(posedge clk) begin
    if (take && is_softmax_q && pass_first) peak_q <= chunk_peak;
    if (take && !pass_last) begin
      total_q <= chunk_total;
      sum_q   <= chunk_sum;
    end
  end
  assign peak = peak_q;

  // The solver.
  typedef enum logic [2:0] {IDLE, NORMALISE, ROOT, DIVIDE, SCALE} phase_t;
  phase_t phase_q;
  logic [3:0] step_q;
  logic [SPREAD_BITS-1:0] value_q;  // sum of powers, or the spread of the row
  logic [31:0] divisor_q;           // before that the number whose root is drawn
  logic [31:0] rest_q;
  logic [15:0] result_q;            // root, then quotient
  logic [5:0] amount_q;
  logic [30:0] slope_q;
  logic signed [38:0] offset_q;

  logic [5:0] bits;
  always_comb begin
    bits = '0;
    for (int unsigned i = 0; i < SPREAD_BITS; i++) if (value_q[i]) bits = 6'(i + 1);
    if (!is_softmax_q && !f_root_odd) bits = bits + 6'(bits[0]);
  end
  wire [31:0] scaled = 32'({value_q, 32'd0} >> bits);

  // One subtraction serves both: two more bits of a number against the root so far, or one of a
  // quotient.
  wire is_root = phase_q == ROOT;
  wire [32:0] minuend = is_root ? {rest_q[30:0], divisor_q[31:30]} : {rest_q, 1'b0};
  wire [32:0] subtrahend = is_root ? {15'd0, result_q, 2'b01} : {1'b0, divisor_q};
  wire fits = minuend >= subtrahend;
  wire [31:0] rest = 32'(fits ? minuend - subtrahend : minuend);

  // n^2 times the variance, below 2^42: what is above 43 bits on the way does not matter.
  wire [42:0] spread = 43'(n_q) * 43'(total_q) - 43'(sum_q) * 43'(sum_q);
  always_ff @(posedge clk) begin
    if (rst || start) begin
      phase_q <= IDLE;
    end else begin
      case (phase_q)
        NORMALISE: begin
          phase_q <= is_softmax_q ? DIVIDE : ROOT;
          step_q <= '0;
          divisor_q <= scaled;
          rest_q <= is_softmax_q ? {1'b0, multiplier_q, 16'd0} : '0;
          result_q <= '0;
          if (is_softmax_q) amount_q <= bits + 6'(shift_q);
          else amount_q <= bits < 6'd8 ? '0 : (bits >> 1) - 6'd4;
        end
        ROOT: begin
          divisor_q <= divisor_q << 2;
          rest_q <= rest;
          result_q <= {result_q[14:0], fits};
          step_q <= step_q + 1'b1;
          if (step_q == LAST_STEP) begin
            phase_q <= DIVIDE;
            divisor_q <= {result_q[14:0], fits, 16'd0};
            rest_q <= 32'h8000_0000;
          end
        end
        DIVIDE: begin
          rest_q <= rest;
          result_q <= {result_q[14:0], fits};
          step_q <= step_q + 1'b1;
          if (step_q == LAST_STEP) phase_q <= is_softmax_q ? IDLE : SCALE;
        end
        SCALE: begin
          phase_q  <= IDLE;
          slope_q  <= 31'(n_q) * 31'(result_q);
          offset_q <= 39'(sum_q) * 39'(signed'({1'b0, result_q}));
        end
        default: ;
      endcase
      if (row_ready) begin
        phase_q <= NORMALISE;
        value_q <= is_softmax_q ? SPREAD_BITS'(total_q) : {spread, 8'd0} + epsilon_q;
      end
    end
  end
  assign reciprocal = result_q;
  assign amount = amount_q;
  assign slope = slope_q;
  assign offset = offset_q;
endmodule
